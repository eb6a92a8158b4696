"""The interfaces of `lade` and `pia`, for scripts that were written for them.

from lookfar.compat import lade                      # instead of: import lade
from lookfar.compat.pia import LlamaForCausalLM      # instead of: from pia.lookahead.models.llama… import …
"""
