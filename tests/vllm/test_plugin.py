"""How vLLM finds the connector."""

import importlib.metadata
import subprocess
import sys

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

from kvferry.vllm import plugin


def test_the_entry_point_names_the_plugin() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [point.value for point in points if point.name == "kvferry"] == ["kvferry.vllm.plugin:register"]


def test_registering_twice_is_no_error_and_the_name_is_enough() -> None:
    plugin.register()
    plugin.register()
    by_name = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_producer")
    )
    by_path = KVConnectorFactory.get_connector_class(
        KVTransferConfig(
            kv_connector="KVFerryConnector", kv_connector_module_path="kvferry.vllm.connector", kv_role="kv_both"
        )
    )
    assert by_name is by_path
    assert supports_hma(by_name)


def test_importing_kvferry_loads_neither_vllm_nor_torch_nor_a_transport() -> None:
    code = (
        "import sys, kvferry, kvferry.vllm.plugin, kvferry.agent, kvferry.transport.registry, kvferry.cli.main;"
        "print([name for name in ('vllm', 'torch', 'nixl', 'transformers') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
