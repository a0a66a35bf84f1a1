"""Triton's interpreter under numpy 2.4 and later, which no longer turns an array of one element into a number."""

from triton.runtime import interpreter

_patch = interpreter._patch_lang_tensor


def _patch_with_item(tensor, scope):
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_with_item
