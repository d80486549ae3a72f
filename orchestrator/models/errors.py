"""What can go wrong with a model before an engine sees it.

ModelError
|- UnknownModelError      no folder, prepared model or Hub id of that name
|- ModelNotPreparedError  a prepared model that has not been prepared yet
|- PrepareError           a download, a hash or the disk failed while preparing
`- GgufError              a GGUF file that is damaged, or of a kind that is not converted
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be had; the message says why and what to do."""


class UnknownModelError(ModelError):
    """The name fits no folder, no prepared model and no Hub id."""


class ModelNotPreparedError(ModelError):
    """The model is known but its folder has not been made yet."""


class PrepareError(ModelError):
    """Preparing a model failed; what had been verified is kept, so a second try continues there."""


class GgufError(ModelError):
    """A GGUF file is damaged or holds what is not converted."""
