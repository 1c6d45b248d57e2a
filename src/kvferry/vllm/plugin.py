"""vLLM's plugin entry point: makes the connector known by its name, in every process of vLLM."""

NAME = "KVFerryConnector"
MODULE = "kvferry.vllm.connector"


def register() -> None:
    """Registers once however often vLLM calls it. Imports the factory only; the connector is loaded when used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
