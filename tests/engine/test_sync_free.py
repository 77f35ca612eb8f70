"""No code of the engine waits for the device by accident: values leave torch through `copies.py` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import sidestream

PACKAGE = Path(sidestream.__file__).parent
FORBIDDEN = {"cpu", "item", "numpy", "tolist", "synchronize"}
SOURCES = sorted([*(PACKAGE / "engine").glob("*.py"), PACKAGE / "models" / "decoder.py"])

# (file, function): why the call is not on a device tensor
ALLOWED = {
    ("loop.py", "process_batch_result"): "a list of `host_array(...)`, numpy",
    ("copies.py", "copy_late"): "the event of the one late row",
    ("copies.py", "wait"): "the step's copy_done",
    ("copies.py", "host_array"): "the door itself",
    ("streams.py", "wait"): "one CPU stream waits for another",
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


def test_nothing_in_the_engine_imports_the_text_side() -> None:
    for path in (PACKAGE / "engine").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                assert not module.startswith(("sidestream.text", "sidestream.api", "sidestream.client")), f"{path.name} imports {module}"
