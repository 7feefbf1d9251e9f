"""A real tokenizer of a few hundred tokens. Whoever needs no model loads no torch for it."""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320
EOS_TOKEN_ID = 1
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
_TEXT = [
    "the quick brown fox jumps over the lazy dog",
    "a person sees the other person",
    "0123456789",
]


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of VOCAB_SIZE tokens: any text round-trips, characters may span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<unk>", "<eos>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 20, trainer)
    missing = VOCAB_SIZE - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"[filler{index}]" for index in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        eos_token="<eos>",
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
