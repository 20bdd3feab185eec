"""TRL: `train_trl.py OPTIMIZER sft|grpo [CHECKPOINT]`."""

import random
import sys

from datasets import Dataset
from frameworks import make_optimizer, report
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from compopt.integrations.hf import CompoptCallback

name, kind, *checkpoint = sys.argv[1:]
words = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(61))])}
tokens = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
special = dict(pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
set_seed(0)
sizes = dict(n_layer=2, n_head=2, n_embd=64, vocab_size=64, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))
optimizer = make_optimizer(name, model.named_parameters(), lr=3e-3)
options = dict(
    output_dir=f"out_{kind}_{name}",
    use_cpu=True,
    bf16=False,
    max_steps=8,
    logging_steps=1,
    save_steps=4,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=False,
    max_grad_norm=0.5,
    learning_rate=3e-3,
    report_to=[],
    ddp_find_unused_parameters=False,
    average_tokens_across_devices=name != "local",
)
callbacks = [CompoptCallback()] if name != "adamw" else []
common = dict(model=model, processing_class=tokenizer, optimizers=(optimizer, None), callbacks=callbacks)
random.seed(1)
if kind == "sft":
    rows = [{"text": " ".join(f"w{(s + i * k) % 61}" for i in range(20))} for s in range(61) for k in (1, 2)]
    data = Dataset.from_list(rows)
    args = SFTConfig(**options, max_length=32, eval_strategy="steps", eval_steps=4)
    trainer = SFTTrainer(**common, args=args, train_dataset=data, eval_dataset=data.select(range(16)))
else:

    def reward(completions: list[str], **_: object) -> list[float]:
        return [text.count("w7") + 0.1 * len(set(text.split())) for text in completions]

    data = Dataset.from_list([{"prompt": f"w{s} w{s + 1}"} for s in range(60)])
    args = GRPOConfig(**options, num_generations=4, max_completion_length=8, beta=0.0)
    trainer = GRPOTrainer(**common, args=args, reward_funcs=reward, train_dataset=data)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
history = [entry for entry in trainer.state.log_history if "loss" in entry]
numbers = {"losses": [entry["loss"] for entry in history], "share": history[-1].get("share")}
numbers["rewards"] = [entry.get("reward") for entry in history]
numbers["norms"] = [entry["grad_norm"] for entry in history]
report(trainer.accelerator.unwrap_model(trainer.model), **numbers)
