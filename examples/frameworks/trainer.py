"""Train a small classifier with the Trainer of Hugging Face, with validation and early stopping.

    paceline run --workers 2 --pace .05,.15 --sync asp examples/frameworks/trainer.py

The script also runs alone, with `python examples/frameworks/trainer.py`, and needs no network. It needs this package:
pip install 'paceline[transformers]'
"""

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

from paceline.integrations.transformers import distribute


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Sentences of numbers. The label says whether the first word is in the second half of the vocabulary."""

    def __init__(self, count: int, seed: int) -> None:
        self.words = torch.randint(50, (count, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.words[index]
        return {"input_ids": words, "labels": (words[0] >= 25).long()}


torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)
arguments = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=8,
    num_train_epochs=4,
    learning_rate=3e-3,
    warmup_steps=5,
    max_grad_norm=1.0,
    eval_strategy="epoch",
    save_strategy="epoch",
    save_total_limit=2,
    logging_steps=10,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    report_to=[],
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=Sentences(512, seed=1),
    eval_dataset=Sentences(128, seed=2),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
)
distribute(trainer)  # the only line that a run with Paceline needs
trainer.train()
trainer.save_model("trained")
