#!/usr/bin/env python3
"""Compares the tokenizer of a GGUF file of SentencePiece's kind with the package `sentencepiece`.

    check-tokenizer.py FILE.gguf --url http://127.0.0.1:8000     asks the server that serves the file
    check-tokenizer.py FILE.gguf --write IDS.jsonl --count 300   writes what a test compares with
    check-tokenizer.py --train FOLDER                            trains and writes the tests' own tokenizers

Texts are lines and parts of lines of this repository's files and of more files (--texts), and random strings.
Needs the packages gguf, protobuf and sentencepiece.
"""

import argparse
import io
import json
import pathlib
import random
import sys
import urllib.request

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb

ROOT = pathlib.Path(__file__).resolve().parent.parent
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Besides code and English.
SENTENCES = [
    "Der Fuchs läuft über die Straße, während es in Köln regnet.",
    "Où est passé l’été ? Ça, c’est une autre histoire…",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "我能吞下玻璃而不伤身体。今天天气很好，我们去公园吧。",
    "いろはにほへと ちりぬるを。カタカナと漢字も。",
    "다람쥐 헌 쳇바퀴에 타고파. 안녕하세요!",
    "صِف خَلقَ خَودِ كَمِثلِ الشَمسِ إِذ بَزَغَت",
    "नमस्ते दुनिया। यह एक परीक्षण है।",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "🦀 and 👩‍👩‍👧‍👦, 🇩🇪🇫🇷, e\u0301 is not é, \u200b\ufeff\u00a0\u3000.",
    "x = [1, 2.5e-10, 0xFF]\n\tif x:\n\t\treturn  {  'a' :   1 }\n\n\n\n",
    "<0x0A> <unk> ▁ ▁▁ <s> \u0000\u0001\u007f \ufffd \U0010ffff",
]


def model_of(file):
    """The SentencePiece model with the tokens, scores and types of a GGUF file."""
    fields = gguf.GGUFReader(file).fields

    def get(key, default):
        field = fields.get(f"tokenizer.ggml.{key}")
        return default if field is None else field.contents()

    if get("model", None) != "llama":
        sys.exit(f"check-tokenizer: tokenizer.ggml.model of {file} is not llama")
    names, scores, types = get("tokens", []), get("scores", []), get("token_type", [])
    unknown = get("unknown_token_id", types.index(UNKNOWN) if UNKNOWN in types else 0)
    model = pb.ModelProto()
    for id, (name, score, kind) in enumerate(zip(names, scores, types)):
        # Converters write the spaces of user-defined tokens as spaces.
        name = name.replace(" ", "▁") if kind == USER_DEFINED else name
        kind = UNKNOWN if id == unknown else kind
        model.pieces.add(piece=name, score=score, type=kind)
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = BYTE in types
    model.trainer_spec.unk_id = unknown
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = get("add_space_prefix", True)
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    special = [name for name, kind in zip(names, types) if kind in (CONTROL, UNKNOWN)]
    return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString()), names, special


def natural(files):
    """Lines of text."""
    lines = list(SENTENCES)
    for file in files:
        lines += file.read_text(errors="replace").splitlines(keepends=True)
    return [line for line in lines if line.strip()]


def strings(count, lines, names, special, seed):
    """Half natural, half random; none has a special token's name, which SentencePiece does not read."""
    rng = random.Random(seed)
    ranges = [(0x20, 0x7F), (0, 0x20), (0xA0, 0x500), (0x900, 0xE00), (0x3000, 0xD7FF), (0xE000, 0x10FFFF)]

    def character():
        low, high = rng.choice(ranges)
        return chr(rng.randrange(low, high))

    def random_text():
        kind = rng.randrange(5)
        if kind == 0:  # Any characters.
            return "".join(character() for _ in range(rng.randrange(1, 40)))
        if kind == 1:  # Few letters, so that many merges compete.
            letters = rng.sample("abcdehinorst. ▁\n\t-=0", rng.randrange(1, 5))
            return "".join(rng.choice(letters) for _ in range(rng.randrange(1, 120)))
        if kind == 2:  # Tokens behind each other, and parts of them.
            parts = (rng.choice(names).replace("▁", " ") for _ in range(rng.randrange(1, 20)))
            return "".join(part[rng.randrange(2) :] for part in parts)
        if kind == 3:  # Runs.
            runs = (rng.choice(" \n\t-=*#_a0▁") * rng.randrange(1, 70) for _ in range(rng.randrange(1, 6)))
            return "".join(runs)
        text = list(rng.choice(lines))  # Natural text, disturbed.
        for _ in range(rng.randrange(1, 8)):
            text.insert(rng.randrange(len(text) + 1), rng.choice([character(), " ", "  ", "\n"]))
        return "".join(text)

    found = SENTENCES[:]
    while len(found) < count:
        if len(found) % 2:
            text = random_text()
        else:
            at = rng.randrange(len(lines))
            text = "".join(lines[at : at + rng.choice([1, 1, 2, 5])])
            start = rng.choice([0, 0, rng.randrange(len(text))])
            text = text[start : start + 400]
        found.append(text)
    return [text for text in found if not any(name in text for name in special)]


def ask(url, text):
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{url}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["tokens"]


def train(folder):
    """Small tokenizers: as Gemma's, and as Llama 2's, which puts a space in front."""
    lines = [line.strip("\n") for line in natural([ROOT / "README.md"])]
    for name, prefix, user_defined in [
        ("sentencepiece", False, ["<tool>", "</tool>", "\n", "\n\n", "▁▁", "▁▁▁▁", "ab"]),
        ("sentencepiece-prefix", True, []),
    ]:
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=out,
            model_type="bpe",
            vocab_size=1000,
            character_coverage=0.99,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=prefix,
            allow_whitespace_only_pieces=True,
            split_by_whitespace=False,
            user_defined_symbols=user_defined,
            control_symbols=["<turn>"],
            minloglevel=2,
        )
        model = pb.ModelProto.FromString(out.getvalue())
        writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama")
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        names = [p.piece.replace("▁", " ") if p.type == USER_DEFINED else p.piece for p in model.pieces]
        writer.add_token_list(names)
        writer.add_token_scores([p.score for p in model.pieces])
        writer.add_token_types([p.type for p in model.pieces])
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_bos_token(True)
        writer.add_add_eos_token(prefix)
        writer.add_add_space_prefix(prefix)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="the GGUF file")
    parser.add_argument("--url", help="a server that serves it")
    parser.add_argument("--write", type=pathlib.Path, help="where texts and ids are written, a line each")
    parser.add_argument("--count", type=int, default=10_000, help="number of texts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--texts", type=pathlib.Path, nargs="*", default=[], help="files with more texts")
    parser.add_argument("--train", type=pathlib.Path, help="folder of the tests' tokenizers")
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    if not options.file or not (options.url or options.write):
        parser.error("a file, and --url or --write, are needed")
    processor, names, special = model_of(options.file)
    files = [*sorted(ROOT.glob("crates/*/src/**/*.rs")), *ROOT.glob("*.md"), *sorted(ROOT.glob("docs/**/*.md"))]
    texts = strings(options.count, natural(files + options.texts), names, special, options.seed)
    ids = processor.encode(texts)
    if options.write:
        lines = (json.dumps({"text": t, "ids": i}, ensure_ascii=False) + "\n" for t, i in zip(texts, ids))
        options.write.write_text("".join(lines))
        return
    different = 0
    for text, want in zip(texts, ids):
        got = ask(options.url, text)
        if got != want:
            different += 1
            print(f"{text!r}\n  sentencepiece {processor.id_to_piece(want)}\n  the server    {got}")
    print(f"{len(texts)} texts, {sum(map(len, ids))} tokens: {different} different")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
