from __future__ import annotations

import pytest

from kvferry.cli import logs

ENGINE_FAILS = """\
(APIServer pid=10) INFO 11-29 18:27:23 [model.py:733] Resolved architecture: LlamaForCausalLM
(EngineCore pid=20) INFO 11-29 18:27:37 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
(EngineCore pid=20) ERROR 11-29 18:27:40 [core.py:1200] Traceback (most recent call last):
(EngineCore pid=20) ERROR 11-29 18:27:40 [core.py:1200]     raise ValueError(
(EngineCore pid=20) ERROR 11-29 18:27:40 [core.py:1200] ValueError: No available memory for the cache blocks.
(APIServer pid=10) Traceback (most recent call last):
(APIServer pid=10)     raise RuntimeError(
(APIServer pid=10) RuntimeError: Engine core initialization failed. See root cause above.
""".splitlines()


def test_the_last_error_is_the_cause_not_its_consequence() -> None:
    assert logs.last_error(ENGINE_FAILS) == "ValueError: No available memory for the cache blocks."


def test_a_consequence_is_better_than_nothing() -> None:
    assert logs.last_error(ENGINE_FAILS[-3:]).startswith("RuntimeError: Engine core initialization failed")


def test_a_log_without_an_error_has_none() -> None:
    assert logs.last_error([]) == ""
    assert logs.last_error(["INFO 11-29 18:27:23 [a.py:1] no error here", "Error handling is on"]) == ""


def test_an_exception_of_a_module_and_one_without_text() -> None:
    assert (
        logs.last_error(["zmq.error.ZMQError: Address already in use"]) == "zmq.error.ZMQError: Address already in use"
    )
    assert logs.last_error(["Traceback", "KeyboardInterrupt"]) == "KeyboardInterrupt"


def test_an_option_that_the_server_does_not_know() -> None:
    assert logs.last_error(["api_server.py: error: unrecognized arguments: --x"]).endswith(
        "unrecognized arguments: --x"
    )


def test_a_validation_error_comes_with_what_is_wrong() -> None:
    lines = [
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
        "  Value error, 9 heads must be divisible by 2. [type=value_error, input_value=ArgsKwargs((), {})]",
        "    For further information visit a page",
    ]
    assert logs.last_error(lines).endswith(
        "1 validation error for VllmConfig: Value error, 9 heads must be divisible by 2."
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("OSError: [Errno 98] Address already in use", "port"),
        ("RuntimeError: operator torchvision::nms does not exist", "pip uninstall --yes torchvision"),
        ("ValueError: No available memory for the cache blocks.", "too little memory"),
        ("OSError: [Errno 28] No space left on device", "/dev/shm"),
        ("ValueError: something else", ""),
    ],
)
def test_advice(text: str, words: str) -> None:
    assert words in logs.advice(text)
    assert bool(logs.advice(text)) == bool(words)


def test_the_phase_is_the_furthest_reached() -> None:
    assert logs.phase([]) == "importing vLLM"
    assert logs.phase(ENGINE_FAILS[:1]) == "reading the model's configuration"
    assert logs.phase(ENGINE_FAILS) == "starting the engine"
    assert logs.phase(["INFO:     Application startup complete."]) == "up"
