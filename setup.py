"""The C passes, compiled; and the text that a package index shows: README.md, whose relative links
lead nowhere from there.
"""

import re
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ADDRESS = ""  # of the repository's files, for the owner to say: "https://.../blob/main/"
ROOT = Path(__file__).resolve().parent
NATIVE = "kernels/native"
PASSES = runpy.run_path(str(ROOT / NATIVE / "build_passes.py"))


def described(text: str, address: str = ADDRESS) -> str:
    """Relative links made absolute; without an address words instead of links, and no pictures."""
    pictures, links = (
        r"!\[([^]]*)\]\((?!https?:)([^)]*)\)\n*",
        r"(?<!!)\[([^]]*)\]\((?!https?:)([^)]*)\)",
    )
    text = re.sub(pictures, rf"![\1]({address}\2)\n\n" if address else "", text)
    return re.sub(links, rf"[\1]({address}\2)" if address else r"\1", text)


class BuildPasses(build_ext):
    """Compile the passes for each instruction set. They are no modules: ctypes loads them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = True

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extensions(self) -> None:
        for ext in self.extensions:  # what an earlier build has left
            Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)
        if PASSES["find_compiler"]() is None:
            self.warn(PASSES["NO_COMPILER"])
        else:
            super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        out = Path(self.get_ext_fullpath(ext.name))
        try:
            PASSES["compile_passes"](out.stem, out)
        except RuntimeError as error:
            raise CompileError(str(error)) from error


class Wheel(bdist_wheel):
    """A wheel for one kind of machine, and every Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def make_extensions() -> list[Extension]:
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / NATIVE).glob("*.c"))
    name = "compopt_kernels.native"
    return [Extension(f"{name}.{isa}", sources, optional=True) for isa in PASSES["ISAS"]]


if __name__ == "__main__":
    setup(
        long_description=described((ROOT / "README.md").read_text()),
        long_description_content_type="text/markdown",
        ext_modules=make_extensions(),
        cmdclass={"build_ext": BuildPasses, "bdist_wheel": Wheel},
    )
