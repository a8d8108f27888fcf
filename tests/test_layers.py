"""Style rule 5: a file imports only from lower floors; floors 0 to 2 import neither torch nor _C."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import epbuf

PACKAGE = Path(epbuf.__file__).parent

# The table of floors, lowest first. A folder is one unit: its files may import each other.
TABLE = (
    ("errors",),
    ("config", "schedule", "memory_map"),
    ("plan",),
    ("reference", "accounting", "growth", "report", "windows", "control"),
    ("engine", "agreement"),
    ("engines",),
    ("lease", "debug"),  # a lease knows its arena by a protocol
    ("marks",),  # knows the memory by a protocol
    ("generation",),  # makes a book of leases
    ("arena",),  # acquire() makes leases
    ("checks",),
    ("ops",),
    ("autograd",),
    ("capture",),
    ("testing", "cli", "integrations"),
)
FLOORS = {unit: floor for floor, units in enumerate(TABLE) for unit in units}
FIRST_FLOOR_WITH_TORCH = 3
LAZY = "__init__"  # loads names on demand; only errors is imported at once

FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def unit_of(file: Path) -> str:
    """Name the row of the table that a file belongs to."""
    return file.parts[0] if len(file.parts) > 1 else file.stem


def imported_modules(source: str) -> set[str]:
    """List the modules that a file imports anywhere: at its top, inside functions, and for type checkers."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide floors"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules.update(names if node.module == "epbuf" else {str(node.module)})
    return modules


def imported_units(source: str) -> set[str]:
    """List the rows of the table that a file imports from, and _C."""
    return {module.split(".")[1] for module in imported_modules(source) if module.startswith("epbuf.")}


def violations(unit: str, source: str) -> list[str]:
    """Say what a file of `unit` imports that it must not."""
    floor = FLOORS[unit]
    modules = imported_modules(source)
    found = [f"{unit} (floor {floor}) imports all of epbuf"] if "epbuf" in modules else []
    for other in sorted(imported_units(source) - {unit, "_C"}):
        if FLOORS.get(other, floor) >= floor:
            found.append(f"{unit} (floor {floor}) imports {other} (floor {FLOORS.get(other)})")
    if floor < FIRST_FLOOR_WITH_TORCH:
        native = {module for module in modules if module.split(".")[0] == "torch" or module.startswith("epbuf._C")}
        found.extend(f"{unit} (floor {floor}) imports {module}" for module in sorted(native))
    return found


@pytest.mark.parametrize("file", [file for file in FILES if unit_of(file) != LAZY], ids=str)
def test_file_imports_only_from_lower_floors(file: Path) -> None:
    assert unit_of(file) in FLOORS, f"{file} has no floor: add it to the table"
    assert violations(unit_of(file), (PACKAGE / file).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("unit", "source", "fault"),
    [
        ("plan", "from epbuf.arena import Arena", "plan (floor 2) imports arena (floor 9)"),
        ("config", "from epbuf import schedule", "config (floor 1) imports schedule (floor 1)"),
        ("plan", "def f():\n    import torch.nn", "plan (floor 2) imports torch.nn"),
        ("errors", "from epbuf import _C", "errors (floor 0) imports epbuf._C"),
        ("ops", "import epbuf", "ops (floor 11) imports all of epbuf"),
        ("ops", "from epbuf.helpers import x", "ops (floor 11) imports helpers (floor None)"),
    ],
)
def test_wrong_import_is_found(unit: str, source: str, fault: str) -> None:
    assert violations(unit, source) == [fault]


def run_python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_planning_imports_neither_torch_nor_the_native_module() -> None:
    program = """
import sys, epbuf
config = epbuf.EpConfig(num_ranks=8, num_experts=256, num_topk=8, hidden=7168, max_tokens_per_rank=4096)
plan = epbuf.Plan.build(config, epbuf.Schedule.sequential(4))
str(plan), plan.to_json(), plan.to_svg()
print([name for name in sys.modules if name == "torch" or name.startswith("epbuf._C")])
"""
    assert run_python(program).strip() == "[]"


def test_import_of_the_package_loads_only_errors() -> None:
    program = "import sys, epbuf; print(sorted(name for name in sys.modules if name.startswith('epbuf')))"
    assert run_python(program).strip() == "['epbuf', 'epbuf.errors']"


def test_command_line_plans_without_torch() -> None:
    program = """
import sys
from epbuf import cli
try:
    cli.main(["plan", "--model", "mixtral-8x7b", "--ep", "8", "--tokens", "64"])
except SystemExit:
    print("torch" in sys.modules)
"""
    assert run_python(program).splitlines()[-1] == "False"


def homes_for_type_checkers() -> dict[str, str]:
    """Read the package's imports under TYPE_CHECKING: public name -> module."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for block in tree.body if isinstance(block, ast.If) for node in block.body]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("name", epbuf.__all__)
def test_public_name_is_what_type_checkers_see(name: str) -> None:
    home = homes_for_type_checkers().get(name, "epbuf")
    assert getattr(epbuf, name) is getattr(importlib.import_module(home), name)


def test_public_names_are_those_of_the_design() -> None:
    expected = "EpConfig Payload Schedule Plan Arena Lease Received dispatch combine unpack CapturedStep errors"
    assert set(epbuf.__all__) == set(expected.split()) == set(dir(epbuf))


def test_unknown_name_is_an_attribute_error_that_lists_names() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'dispatcher'.*dispatch"):
        epbuf.dispatcher  # noqa: B018
