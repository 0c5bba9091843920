"""Make tests/data/tokenizer.json: byte-level BPE of 512 tokens, trained on data/sample.parquet.

Run it with `python tests/make_tokenizer.py`; it prints the vocabulary size.
"""

from pathlib import Path

import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

REPOSITORY = Path(__file__).resolve().parent.parent
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCAB_SIZE = 512


def build_tokenizer() -> Tokenizer:
    """A tokenizer that adds BOS and EOS, as a trained one on a hub would."""
    texts = pq.read_table(REPOSITORY / "data" / "sample.parquet").column("text").to_pylist()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> <s> $B </s>", special_tokens=special
    )
    return tokenizer


if __name__ == "__main__":
    made = build_tokenizer()
    made.save(str(REPOSITORY / "tests" / "data" / "tokenizer.json"))
    print(f"{made.get_vocab_size()} tokens")
