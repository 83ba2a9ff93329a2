"""Made-up trials of the demo, for tests that need many of them."""

from __future__ import annotations

import math
from pathlib import Path

from paceline.lab.demo import DemoSetting, Digits, Problem, Trial
from paceline.look.tables import TrialOutcome


class FakeTrials:
    """Replaces live runs. The best setting is step 2 without momentum."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self,
        digits: Digits,
        problem: Problem,
        setting: DemoSetting,
        seed: int,
        *,
        run_dir: Path,
        progress: bool | None,
    ) -> Trial:
        self.count += 1
        time_s = 5 + abs(math.log2(setting.learning_rate / 0.2)) + setting.momentum + 0.1 * seed
        plain = TrialOutcome(
            sync=setting.sync,
            batch=setting.batch,
            hyperparameters=setting.hyperparameters,
            learning_rate=setting.learning_rate,
            momentum=setting.momentum,
            seeds=(seed,),
            target_accuracy=problem.target_accuracy,
            time_to_target_s=time_s if time_s < 7.5 else None,
            final_accuracy=0.9,
            updates_per_s=1.0,
            gradients_per_s=1.0,
            samples_per_s=32.0,
            waiting_share=0.0,
            mean_staleness=0.0,
            max_staleness=0,
            emulated="",
        )
        return Trial(plain, (), run_dir)
