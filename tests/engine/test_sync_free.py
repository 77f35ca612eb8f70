"""No code of the engine waits for the device by accident: values leave torch through `copies.py` alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import sidestream
from sidestream import SamplingParams
from sidestream.engine.runner import Runner

PACKAGE = Path(sidestream.__file__).parent
FORBIDDEN = {"cpu", "item", "numpy", "tolist", "synchronize"}
SOURCES = sorted([*(PACKAGE / "engine").glob("*.py"), PACKAGE / "models" / "decoder.py"])

# (file, function): why the call is not on a device tensor
ALLOWED = {
    ("loop.py", "process_batch_result"): "a list of `host_array(...)`, numpy",
    ("outputs.py", "plan"): "host arithmetic, numpy",
    ("memory.py", "put_tokens"): "where there is no device but the CPU",
    ("copies.py", "copy_late"): "the event of the one late row",
    ("copies.py", "wait"): "the step's copy_done",
    ("copies.py", "host_array"): "the door itself",
    ("streams.py", "item"): "one CPU stream waits for another",
    ("streams.py", "close"): "the end of a CUDA stream",
}


def calls() -> list[tuple[str, str, str, int]]:
    """(file, innermost function, method, line) of every call of a forbidden method."""
    found = []
    for path in SOURCES:
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        for function in functions:
            inner = {
                id(n)
                for child in ast.walk(function)
                if child is not function and isinstance(child, ast.FunctionDef)
                for n in ast.walk(child)
            }
            for node in ast.walk(function):
                is_method_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in inner
                if is_method_call and node.func.attr in FORBIDDEN:
                    found.append((path.name, function.name, node.func.attr, node.lineno))
    return found


def test_the_scan_sees_the_door_itself() -> None:
    assert ("copies.py", "host_array", "numpy") in {(file, function, method) for file, function, method, _ in calls()}


def test_device_values_leave_only_in_copies() -> None:
    strays = [call for call in calls() if call[:2] not in ALLOWED]
    assert strays == []


def test_every_exception_is_needed() -> None:
    assert {call[:2] for call in calls()} == set(ALLOWED)


def test_the_scan_sees_every_call() -> None:
    """Calls outside of functions are not told apart by function: there are none."""
    seen = calls()
    for path in SOURCES:
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ]
        assert len([1 for node in nodes if node.func.attr in FORBIDDEN]) == len([call for call in seen if call[0] == path.name])


class OnlySome:
    """A grammar that admits half of the tokens."""

    def fill_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        mask[:] = 0x0F0F0F0F

    def advance(self, token_id: int) -> bool:
        return False


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_no_step_waits_for_the_device(open_engine: Any, monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    """With every transform of the sampler, every kind of output and both call sites."""
    guarded = []

    def guard(name: str) -> None:
        original = getattr(Runner, name)

        def strict(self: Runner, *args: Any) -> Any:
            guarded.append(name)
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(Runner, name, strict)

    guard("_run_batch")
    guard("_sample_late")
    samplings = [
        SamplingParams(max_new_tokens=6, temperature=0.0),
        SamplingParams(max_new_tokens=6, seed=1, top_k=20, top_p=0.9, min_p=0.01),
        SamplingParams(max_new_tokens=6, seed=2, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5),
        SamplingParams(max_new_tokens=6, seed=3, logit_bias={9: 2.0}, bad_token_ids=[5], allowed_token_ids=range(3, 200), min_new_tokens=3),
        SamplingParams(max_new_tokens=6, seed=4, n=2),
    ]
    with open_engine(device="cuda", overlap=overlap, constraint=lambda m: OnlySome() if m.prompt[0] == 4 else None) as engine:
        answers = engine.generate(
            [[i] * 20 for i in range(3, 8)],
            samplings,
            logprob_start_len=[0, -1, 3, -1, 0],
            top_logprobs_num=[2, 0, 3, 0, 1],
            token_ids_logprob=[[1, 2], None, None, [7], None],
            logprobs_mode=["raw", "raw", "processed", "processed", "raw"],
            return_hidden_states=[True, "last", False, True, "last"],
            hidden_states_layers=[0, 2, -1],
        )
    assert len(answers) == 6 and set(guarded) == ({"_run_batch", "_sample_late"} if overlap else {"_run_batch"})
    assert all((token // 4) % 2 == 0 for token in answers[1].token_ids)


def test_nothing_in_the_engine_imports_the_text_side() -> None:
    for path in (PACKAGE / "engine").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert not module.startswith(("sidestream.text", "sidestream.api", "sidestream.client")), f"{path.name} imports {module}"
