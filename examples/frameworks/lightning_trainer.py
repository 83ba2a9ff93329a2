"""Train a small classifier with Lightning's Trainer, with validation, checkpoints and early stopping.

    paceline run --workers 2 --pace .05,.15 --sync asp examples/frameworks/lightning_trainer.py

The script also runs alone, with `python examples/frameworks/lightning_trainer.py`, and needs no network. It needs this
package: pip install 'paceline[lightning]'
"""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline.integrations.lightning  # noqa: F401


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        inputs, targets = batch
        outputs = self.network(inputs)
        self.log("val_loss", nn.functional.cross_entropy(outputs, targets))
        self.log("accuracy", (outputs.argmax(1) == targets).float().mean())

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


lightning.seed_everything(0)
x = torch.randn(640, 8)
y = x[:, :3].argmax(1)
trainer = lightning.Trainer(
    strategy="paceline",
    accelerator="cpu",
    max_epochs=20,
    gradient_clip_val=0.5,
    logger=CSVLogger("logs"),
    callbacks=[
        ModelCheckpoint(monitor="val_loss"),
        EarlyStopping("val_loss", patience=3),
        LearningRateMonitor(),
    ],
)
trainer.fit(
    Classifier(),
    DataLoader(TensorDataset(x[:512], y[:512]), batch_size=16, shuffle=True),
    DataLoader(TensorDataset(x[512:], y[512:]), batch_size=64),
)
print("best checkpoint:", trainer.checkpoint_callback.best_model_path)
