"""How the functions that kernels are made of are compiled: to LLVM code alone.

Numba optimises every function it compiles together with all that it calls, and makes machine code
of it. Of a kernel's functions only the kernel is ever run: the others are linked into it and are
optimised there again. So they stay as they were lowered until a kernel has them all; what is
optimised, once, and made machine code of is the kernel. It compiles in half the time.
"""

from __future__ import annotations

import importlib
from typing import Any

from numba.core import codegen, compiler, compiler_machinery, typed_passes

# Numba's own annotations are partial and differ between versions.
_JITCodeLibrary: Any = codegen.JITCodeLibrary
_LoweringPass: Any = compiler_machinery.LoweringPass
_CompilerBase: Any = compiler.CompilerBase
_register: Any = compiler_machinery.register_pass
_dynamic: Any = importlib.import_module("numba._dynfunc")


_NOT_NEEDED = {
    "WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction",
    "InlineInlinables", "FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass",
    "InlineOverloads", "NopythonRewrites", "NoPythonSupportedFeatureValidation", "AnnotateTypes",
    "DumpParforDiagnostics", "RewriteSemanticConstants", "DeadBranchPrune", "GenericRewrites",
}  # fmt: skip
"""Steps for what functions of kernels do not have: closures, ``with``, exceptions, lists, arrays,
``literally``. A twelfth of the time. Names that a version of Numba lacks are nobody's."""


class LinkedLibrary(_JITCodeLibrary):  # type: ignore[misc]
    """LLVM code for linking into others."""

    def _optimize_functions(self, ll_module: Any) -> None:
        """Where it is linked. Each by itself is another eighth of the time."""

    def _optimize_final_module(self) -> None:
        """Where it is linked."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True


@_register(mutates_CFG=False, analysis_only=False)
class _Offer(_LoweringPass):  # type: ignore[misc]
    """What lowering does for a function that it makes machine code of: others may call it."""

    _name = "offload_offer_for_linking"

    def __init__(self) -> None:  # abstract in Numba
        super().__init__()

    def run_pass(self, state: Any) -> bool:
        lowered, library = state.cr, state.library
        described = lowered.fndesc
        # Callers are found by it. Address 0: as ever, there is no wrapper for Python to call.
        handle = _dynamic.make_function(
            described.lookup_module(), described.qualname, "linked", 0, lowered.env, (library,)
        )
        state.targetctx.insert_user_function(handle, described, [library])
        # Of loops that Numba makes parallel, where it has noted them; kernels have none.
        state.reload_init.extend(getattr(library, "_reload_init", ()))
        state.cr = lowered._replace(cfunc=handle)
        return True


class LinkedCompiler(_CompilerBase):  # type: ignore[misc]
    """Numba's compiler up to LLVM code."""

    def define_pipelines(self) -> list[Any]:
        state = self.state
        name = state.func_id.func_qualname
        state.library = LinkedLibrary(state.targetctx.codegen(), name)
        state.flags.no_compile = True
        builder: Any = compiler.DefaultPassBuilder
        usual = builder.define_nopython_pipeline(state, name="offload_linked")
        passes = compiler_machinery.PassManager("offload_linked")
        for step, what in usual.passes:
            if step.__name__ not in _NOT_NEEDED:
                passes.add_pass(step, what)
        passes.add_pass_after(_Offer, typed_passes.NativeLowering)
        passes.finalize()
        return [passes]
