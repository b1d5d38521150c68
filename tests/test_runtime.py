"""What the runtime may use: no export tools, no network; its contract the standard library only; and nothing of export. What onnxruntime refuses is one error."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from runtime_py.graph_onnx import OnnxGraph
from runtime_py.manifest import GraphSpec, TensorSpec

ROOT = Path(__file__).parent.parent
EXPORT_ONLY = (
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "huggingface_hub",
    "export",
)
GUARD = f"""
import sys

def refuse(event, arguments):
    if event == "import" and arguments[0].split(".")[0] in {EXPORT_ONLY}:
        raise RuntimeError(f"runtime_py imports {{arguments[0]}}")
    if event.startswith("socket."):
        raise RuntimeError(f"runtime_py uses the network: {{event}}")

sys.addaudithook(refuse)
from runtime_py.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def imports(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, also within functions."""
    package, names = path.relative_to(ROOT).parts[:-1], set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            whole_package = module in ("runtime_py", "export")
            names |= {f"{module}.{alias.name}" for alias in node.names} if whole_package else {module}
    return names


def sources(folder: str) -> list[Path]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    return files


@pytest.mark.parametrize(
    "arguments", [["generate", "--prompt", "ROMEO:", "--json"], ["generate", "--chat", "Hi"], ["info"]]
)
def test_runtime_needs_no_export_tool_and_no_network(bundle_of, arguments):
    command = [sys.executable, "-c", GUARD, *arguments, str(bundle_of("tiny"))]
    if "generate" in arguments:
        command += ["--max-new-tokens", "20"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


@pytest.mark.parametrize("statement", ["import torch", "import socket; socket.create_connection(('127.0.0.1', 9))"])
def test_the_guard_refuses(statement):
    code = GUARD.replace("from runtime_py.__main__ import main", statement)
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60)
    assert "RuntimeError: runtime_py " in result.stderr


def test_contract_needs_the_standard_library_only():
    code = "import sys, runtime_py.files; sys.exit('numpy' in sys.modules)"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({str(ROOT)!r}); {code}"], check=True
    )
    own = "manifest", "strict_json", "files"
    names = {name for name in own for name in imports(ROOT / f"runtime_py/{name}.py")}
    assert {name.split(".")[0] for name in names - {f"runtime_py.{name}" for name in own}} <= sys.stdlib_module_names


def test_runtime_imports_nothing_of_export_and_only_declared_packages():
    packages = {"runtime_py", "numpy", "onnxruntime", "executorch", "tokenizers", "jinja2", "safetensors", "tqdm"}
    for path in sources("runtime_py"):
        names = {name.split(".")[0] for name in imports(path)}
        if path.name == "graph_executorch_torch.py":  # what runs where the shim cannot be compiled
            names.remove("torch")
        if path.name == "serve.py":  # the extra of that name
            names -= {"starlette", "uvicorn", "anyio"}
        if path.name == "bench_report.py":  # the extra `bench`, and what comes with jinja2
            names -= {"matplotlib", "markupsafe"}
        assert names <= packages | sys.stdlib_module_names, path


def test_export_imports_the_contract_alone_of_the_runtime():
    """but for `export check`, which runs the bundle it checks"""
    writers = [path for path in sources("export") if path.name != "check.py"]
    names = {name for path in writers for name in imports(path) if name.split(".")[0] == "runtime_py"}
    assert names == {"runtime_py.manifest", "runtime_py.files"}


@pytest.mark.parametrize(("length", "message"), [(3, "cannot run it"), (-2, "cannot load it")])
def test_what_onnxruntime_refuses_is_one_error_and_no_log(tmp_path, capfd, length, message):
    """A model that reshapes [T, 2] to rows of 3, or of -2"""
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, length])
    puts = {"x": ("T", 2), "y": ("R", abs(length))}
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes) for name, sizes in puts.items())
    graph = helper.make_graph([helper.make_node("Reshape", ["x", "shape"], ["y"])], "graph", [x], [y], [shape])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    spec = GraphSpec({}, *((TensorSpec(*put),) for put in puts.items()))
    with pytest.raises(ValueError, match=rf"model\.onnx: onnxruntime {message} \([^\n]*\); export the bundle again$"):
        OnnxGraph(tmp_path / "model.onnx", spec, 1)({"x": np.zeros((2, 2), np.float32)})
    assert capfd.readouterr() == ("", "")
