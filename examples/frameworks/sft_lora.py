"""Fine-tune a small language model with trl's SFTTrainer and LoRA, on sentences of different lengths.

    paceline run --workers 3 --pace .05,.05,.15 --sync asp examples/frameworks/sft_lora.py

The model and its tokenizer are made here, so the script needs no network. It also runs alone, with `python
examples/frameworks/sft_lora.py`. It needs these packages: pip install 'paceline[transformers]' trl peft
"""

import random

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from paceline.integrations.transformers import distribute

WORDS = ["[PAD]", "[UNK]", "[EOS]", *(f"w{number}" for number in range(60))]

words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
words.pre_tokenizer = WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]"
)


def sentence(choose: random.Random) -> str:
    """Return a sentence that counts upwards, so that each word determines the next word."""
    first, length = choose.randrange(30), choose.randrange(4, 28)
    return " ".join(f"w{first + step}" for step in range(length))


choose = random.Random(0)
data = Dataset.from_dict({"text": [sentence(choose) for _ in range(384)]})
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    )
)
trainer = SFTTrainer(
    model,
    SFTConfig(
        "checkpoints",
        per_device_train_batch_size=4,
        num_train_epochs=3,
        learning_rate=1e-2,
        max_length=32,
        logging_steps=10,
        save_strategy="epoch",
        gradient_checkpointing=False,
        bf16=False,
        report_to=[],
    ),
    train_dataset=data,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
distribute(trainer)  # the only line that a run with Paceline needs
trainer.train()
trainer.save_model("adapters")
