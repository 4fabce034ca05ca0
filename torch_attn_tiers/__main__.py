"""`python -m torch_attn_tiers`: see `torch_attn_tiers.cli`."""

from __future__ import annotations

import sys

from torch_attn_tiers.cli import main

if __name__ == "__main__":
    sys.exit(main())
