#!/bin/sh
# Removes files that no peer uses from an installed prefix: tests, compilers, headers, and their dependencies.
# The metadata of all remaining packages is kept, so that scanners find them and their versions.
set -eu
packages=$(echo "$1"/lib/python3*/site-packages)

find "$packages" -type d -name tests -prune -exec rm -rf {} +
# torch: C++ headers, build files for extensions, test programs, and a protobuf compiler
for path in include share test; do
    rm -rf "$packages"/torch/"$path"
done
if [ -d "$packages"/torch/bin ]; then find "$packages"/torch/bin -type f ! -name torch_shm_manager -delete; fi
# pyarrow and numpy: headers and static libraries
rm -rf "$packages"/pyarrow/include "$packages"/pyarrow/src "$packages"/numpy/_core/include
find "$packages" \( -name '*.a' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' \) -delete
# Compiled bytecode is kept because it speeds up the start, and a read-only root file system cannot store it later.
# transformers has hundreds of models, of which a run uses only one, so the bytecode of most of them is removed.
find "$packages"/transformers/models -mindepth 2 -type d -name __pycache__ ! -path '*/auto/*' ! -path '*/llama/*' \
    -prune -exec rm -rf {} + 2>/dev/null || true
# If Triton is installed, torch uses it to compile optional kernels, which would fail without a C compiler.
rm -rf "$packages"/triton "$packages"/*triton*.dist-info "$packages"/nvidia/*/include
# hivemind depends on the protobuf compiler, but uses it only when it is built.
rm -rf "$packages"/grpc_tools "$packages"/grpcio_tools-*.dist-info "$1"/bin/python-grpc-tools-protoc
