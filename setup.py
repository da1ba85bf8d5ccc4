"""Generates the gRPC code from ``protos/*.proto`` at build time, for wheels and for editable installs alike.

Everything else about the package stands in pyproject.toml. Alone: ``python setup.py build_protos --inplace``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, setup
from setuptools.command.build import build

ROOT = Path(__file__).resolve().parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


class BuildProtos(Command):  # type: ignore[misc]
    """A ``build`` sub-command (setuptools' protocol: see setuptools.command.build.SubCommand)."""

    description = "generate gRPC code from protos/*.proto"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = [
        ("inplace", "i", "write beside the sources"),
        ("build-lib=", "b", "folder of the built package"),
    ]
    boolean_options: ClassVar[list[str]] = ["inplace"]

    def initialize_options(self) -> None:
        self.inplace = False
        self.editable_mode = False
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def _sources(self) -> list[Path]:
        return sorted((ROOT / "protos").glob("*.proto"))

    def _target(self) -> Path:
        return ROOT if self.inplace or self.editable_mode or self.build_lib is None else Path(self.build_lib)

    def run(self) -> None:
        from grpc_tools import protoc

        target = self._target()
        target.mkdir(parents=True, exist_ok=True)
        arguments = [
            "protoc",
            f"-I{ROOT}",
            f"-I{Path(protoc.__file__).parent / '_proto'}",
            *(f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
            *(str(source.relative_to(ROOT)) for source in self._sources()),
        ]
        # protoc looks for mypy-protobuf's plugins on PATH; in pip's build environment they lie beside this interpreter.
        import os

        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        if protoc.main(arguments) != 0:
            raise SystemExit(f"protoc failed: {' '.join(arguments)}")

    def get_source_files(self) -> list[str]:
        return [str(source.relative_to(ROOT)) for source in self._sources()]

    def get_outputs(self) -> list[str]:
        base = Path(self.build_lib or ".")
        return [str(base / "protos" / (source.stem + suffix)) for source in self._sources() for suffix in SUFFIXES]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


build.sub_commands = [("build_protos", None), *build.sub_commands]

setup(cmdclass={"build_protos": BuildProtos})
