"""Every edit that a test must notice. Edits that leave all results unchanged do not belong here."""

from __future__ import annotations

from core_edits import CORE
from data_edits import DATA
from mixin_edits import MIXINS
from run_edits import RUNS

MUTATIONS = [*CORE, *DATA, *MIXINS, *RUNS]
