"""A fine-tuning with TRL's SFTTrainer and adapters of peft, as a program.

    python -m tests.support.frameworks.sft_job \\
        '{"output": …, "url": …, "memory": …, "killed_at": 5}'

Prints a line of JSON: the step that it resumed from, and the loss of each of its steps.
"""

import json
import os
import signal
import sys
from typing import Any

import pyarrow as pa
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined, unused-ignore]

from dcp_mem.integrations.huggingface import TrainerCheckpoints

STEPS = 8
_WORDS = 2048


def main(spec: dict[str, Any]) -> None:
    torch.manual_seed(7)
    account = _Account(spec["killed_at"])
    trainer: Any = SFTTrainer(
        model=_base(),
        args=SFTConfig(
            spec["output"],
            max_steps=STEPS,
            save_steps=1,
            logging_steps=1,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_length=32,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=_dataset(),
        processing_class=_tokenizer(),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules="all-linear"),
        callbacks=[account],
    )
    checkpoints = TrainerCheckpoints(
        trainer, spec["url"], memory_root=spec["memory"], job="sft", frozen=True
    )
    account.checkpoints = checkpoints
    trainer.train(resume_from_checkpoint=True)
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    status = {
        one.name: [one.nbytes, one.transfer.sent_nbytes] for one in checkpoints.manager.status()
    }
    training = sum(one.nbytes for one in trainer.model.parameters() if one.requires_grad)
    everything = sum(one.nbytes for one in trainer.model.parameters())
    print(
        json.dumps(
            {
                "resumed": account.began,
                "losses": losses,
                "status": status,
                "training": training,
                "everything": everything,
            }
        )
    )


class _Account(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Notes where training begins, has each checkpoint sent, and ends the run within a step."""

    checkpoints: TrainerCheckpoints

    def __init__(self, killed_at: int) -> None:
        self._killed_at = killed_at
        self.began = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = state.global_step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self._killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.checkpoints.manager.wait(state.global_step, progress=False)


def _base() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=_WORDS,
    )
    return LlamaForCausalLM(config)


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{number}": number for number in range(_WORDS - 2)}
    vocabulary |= {"<unk>": _WORDS - 2, "<end>": _WORDS - 1}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>", pad_token="<end>"
    )


def _dataset() -> Dataset:
    rows = [[(7 * one + word) % 500 for word in range(20)] for one in range(12)]
    # Of a table without a name datasets 5.2 makes a hash, which it can't beside pyarrow 26.
    return Dataset(pa.table({"input_ids": rows}), fingerprint="sft")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
