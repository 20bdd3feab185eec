"""sentence-transformers, several backwards in a step: `train_sentences.py OPTIMIZER [CHECKPOINT]`."""

import random
import sys
import tempfile

from datasets import Dataset
from frameworks import make_optimizer, report
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

from compopt.integrations.hf import CompoptCallback

name, *checkpoint = sys.argv[1:]
words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *(f"w{i}" for i in range(62))])}
tokens = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
set_seed(0)
sizes = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
sizes |= dict(max_position_embeddings=40, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
with tempfile.TemporaryDirectory() as folder:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    BertModel(BertConfig(**sizes), add_pooling_layer=False).save_pretrained(folder)
    encoder = Transformer(folder, max_seq_length=32)
model = SentenceTransformer(modules=[encoder, Pooling(64)], device="cpu")
for parameter_name, p in model.named_parameters():
    p.requires_grad_("pooler" not in parameter_name)  # it has no gradient
optimizer = make_optimizer(name, [(n, p) for n, p in model.named_parameters() if p.requires_grad], lr=1e-3)

random.seed(1)
rows = []
for _ in range(160):
    anchor = [f"w{random.randrange(62)}" for _ in range(6)]
    positive = random.sample(anchor, 5) + [f"w{random.randrange(62)}"]
    rows.append({"anchor": " ".join(anchor), "positive": " ".join(positive)})
data = Dataset.from_list(rows)
args = SentenceTransformerTrainingArguments(
    output_dir=f"out_{name}",
    use_cpu=True,
    max_steps=8,
    logging_steps=1,
    save_steps=4,
    eval_strategy="steps",
    eval_steps=4,
    per_device_train_batch_size=16,
    learning_rate=1e-3,
    report_to=[],
    ddp_find_unused_parameters=False,
    average_tokens_across_devices=False,
)
trainer = SentenceTransformerTrainer(
    model=model,
    args=args,
    train_dataset=data,
    eval_dataset=data.select(range(32)),
    loss=CachedMultipleNegativesRankingLoss(model, mini_batch_size=4, gather_across_devices=True),
    optimizers=(optimizer, None),
    callbacks=[CompoptCallback()] if name != "adamw" else [],
)
trainer.train(resume_from_checkpoint=checkpoint[0] if checkpoint else None)
history = [entry for entry in trainer.state.log_history if "loss" in entry]
sent = [entry.get("bytes_sent") for entry in history]
report(model, losses=[entry["loss"] for entry in history], sent=sent)
