"""The gate: the only readers of files that come from outside, a user's as well as a run's own.

    file_kind.py    what a file is expected to be; regular files only; any library's error is one
                    sentence that names the file
    json_files.py   JSON, typed; lines of JSON
    yaml_files.py   configs
    csv_files.py    tables of text
    tensor_files.py safetensors: its header is checked before a byte of a tensor is allocated
    torch_files.py  PyTorch's own format, read without executing anything

Images are decoded in `data`, behind the same rules. `tests/test_gate.py` holds that nobody else
opens a file.
"""
