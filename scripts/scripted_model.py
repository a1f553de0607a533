"""Writes a tiny model whose greedy text is given, so that a test of a whole agent does not depend on a small model's whims.

The model is a Llama with one layer that adds nothing: the next token is a function of the current one alone. Texts are cut
into pieces that are tokens of their own, and the output layer leads from each piece to the next. The chat template ends the
prompt with a token that begins the text of this turn: of the script that the last tagged message of the user names
(`[script: NAME]`), the text after as many answers as followed that message, or the last one. Other prompts get a short
answer.

Prompts are tokenized without loss: words that are frequent in the documentation are tokens, others are bytes.
"""

import collections
import json
import pathlib
import re
import struct

ROOT = pathlib.Path(__file__).resolve().parent.parent
END, START, OTHER = "<|im_end|>", "<|im_start|>", "<|other|>"
CONTEXT = 262_144
HEAD = 16
# So wide that a step takes some milliseconds, and a long text can be cancelled.
WIDTH = 2048
# Of a logit above the others, which are 0, so that a text is certain at any usual temperature.
CERTAIN = 200.0
# What ByteLevel's pre-tokenizer splits texts into, but only of ASCII.
WORDS = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+")

TEMPLATE = """\
{%- set scripts = SCRIPTS -%}
{%- set now = namespace(script='', turn=0) -%}
{%- if tools %}{{ '<|im_start|>system\\nEach function is called in <tool_call></tool_call>.\\n<tools>' }}\
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{%- endfor %}{{ '\\n</tools><|im_end|>\\n' }}{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- for name in scripts -%}
{%- if '[script: ' ~ name ~ ']' in message.content -%}{%- set now.script = name -%}{%- set now.turn = 0 -%}{%- endif -%}
{%- endfor -%}
{%- elif message.role == 'assistant' -%}{%- set now.turn = now.turn + 1 -%}{%- endif -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ (message.content or '') }}
{%- for call in message.tool_calls or [] -%}
{{ '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- set script = scripts[now.script] if now.script in scripts else {'turns': 0, 'tools': false} -%}
{%- if script.turns and script.tools == (true if tools else false) -%}
{{ '<|' ~ now.script ~ '-' ~ [now.turn, script.turns - 1] | min ~ '|>' }}
{%- else -%}{{ '<|other|>' }}{%- endif -%}
{%- endif -%}
"""


def call(name, **arguments):
    """A text that calls a tool."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def write(folder, scripts, endless=()):
    """Writes the model to `folder`. `scripts` maps names to the texts of their turns and whether the request has `tools`:
    `{"name": {"turns": ["..."], "tools": True}}`. The last text of a script in `endless` begins again when it ends."""
    tokenizer = Tokenizer()
    chains = {OTHER: (tokenizer.pieces("This is the answer to any other prompt."), False)}
    for name, script in scripts.items():
        last = len(script["turns"]) - 1
        for turn, text in enumerate(script["turns"]):
            chains[f"<|{name}-{turn}|>"] = (tokenizer.pieces(text), turn == last and name in endless)
    special = [END, START, *chains]
    vocab = tokenizer.vocab | {token: len(tokenizer.vocab) + i for i, token in enumerate(special)}

    # A token of a chain has a dimension of its own, and dimension 0 is that of all others, after which a text ends.
    dimensions, output = collections.Counter(), [(vocab[END], 0)]
    for begin, (pieces, again) in chains.items():
        links = [begin, *pieces]
        for token, after in zip(links, [*pieces, pieces[0] if again else END]):
            dimensions[token] = len(dimensions) + 1
            output.append((vocab[after], dimensions[token]))
    if len(dimensions) >= WIDTH:
        raise ValueError(f"the texts have {len(dimensions)} pieces, and the model has room for {WIDTH - 1}")

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = {name: {"turns": len(script["turns"]), "tools": script["tools"]} for name, script in scripts.items()}
    files = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": HEAD,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": HEAD,
            "max_position_embeddings": CONTEXT, "rope_theta": 1e6, "rms_norm_eps": 1e-9, "hidden_act": "silu",
            "tie_word_embeddings": False, "vocab_size": len(vocab), "eos_token_id": vocab[END], "dtype": "float32",
        },
        "tokenizer_config.json": {"eos_token": END, "chat_template": TEMPLATE.replace("SCRIPTS", json.dumps(known))},
        "tokenizer.json": tokenizer.file(vocab, special),
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")
    layer = "model.layers.0."
    zeros = {"q_proj": (HEAD, WIDTH), "k_proj": (HEAD, WIDTH), "v_proj": (HEAD, WIDTH), "o_proj": (WIDTH, HEAD)}
    zeros = {f"self_attn.{name}": shape for name, shape in zeros.items()}
    zeros |= {"mlp.gate_proj": (HEAD, WIDTH), "mlp.up_proj": (HEAD, WIDTH), "mlp.down_proj": (WIDTH, HEAD)}
    norms = {layer + "input_layernorm": 1.0, layer + "post_attention_layernorm": 1.0}
    # The last norm makes the root of the width of what is 1.
    norms["model.norm"] = CERTAIN / WIDTH**0.5
    tensors = {f"{layer}{name}.weight": (shape, floats(shape)) for name, shape in zeros.items()}
    tensors |= {f"{name}.weight": ((WIDTH,), struct.pack("<f", value) * WIDTH) for name, value in norms.items()}
    shape = (len(vocab), WIDTH)
    embeddings = [(id, dimensions[token]) for token, id in vocab.items()]
    tensors |= {"model.embed_tokens.weight": (shape, floats(shape, embeddings)), "lm_head.weight": (shape, floats(shape, output))}
    safetensors(folder / "model.safetensors", tensors)


def floats(shape, ones=()):
    """The bytes of a matrix of f32 with 1 at the places `ones` and 0 elsewhere."""
    rows, columns = shape
    values = bytearray(4 * rows * columns)
    for row, column in ones:
        struct.pack_into("<f", values, 4 * (row * columns + column), 1.0)
    return values


class Tokenizer:
    """A vocabulary of bytes, frequent words, and the pieces of texts, in the characters that stand for bytes."""

    def __init__(self):
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        self.vocab = {self.characters[byte]: byte for byte in range(256)}
        counts = collections.Counter()
        for file in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/*.py")]:
            counts.update(WORDS.findall(file.read_text()))
        for word, count in counts.most_common():
            if count > 1:
                self.add(word)

    def token(self, text):
        return "".join(self.characters[byte] for byte in text.encode())

    def add(self, text):
        self.vocab.setdefault(self.token(text), len(self.vocab))

    def pieces(self, text):
        """Tokens of which `text` consists, and which no other text has."""
        for size in range(12, len(text) + 12):
            cut = [self.token(text[begin : begin + size]) for begin in range(0, len(text), size)]
            if len(set(cut)) == len(cut) and not any(piece in self.vocab for piece in cut):
                self.vocab |= {piece: len(self.vocab) + i for i, piece in enumerate(cut)}
                return cut
        raise ValueError(f"another text is the same: {text!r}")

    def file(self, vocab, special):
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        added = [
            {"id": vocab[token], "content": token, "special": True, "single_word": False, "lstrip": False,
             "rstrip": False, "normalized": False}
            for token in special
        ]
        model = {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": True}
        return {"version": "1.0", "added_tokens": added, "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}


def safetensors(file, tensors):
    """Writes tensors of f32, given by shape and bytes."""
    header, begin = {}, 0
    for name, (shape, values) in tensors.items():
        end = begin + len(values)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            out.write(values)
