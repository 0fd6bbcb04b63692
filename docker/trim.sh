#!/bin/sh
# Removes from an installed prefix what no peer ever runs: tests, compilers, headers, and what only they need.
# The metadata of each package stays, so that a scanner finds all of them with their versions.
set -eu
packages=$(echo "$1"/lib/python3*/site-packages)

find "$packages" -type d -name tests -prune -exec rm -rf {} +
# torch: C++ headers and build files for extensions, its own test programs, a protobuf compiler
for path in include share test; do
    rm -rf "$packages"/torch/"$path"
done
if [ -d "$packages"/torch/bin ]; then find "$packages"/torch/bin -type f ! -name torch_shm_manager -delete; fi
# pyarrow and numpy: headers and static libraries to link against
rm -rf "$packages"/pyarrow/include "$packages"/pyarrow/src "$packages"/numpy/_core/include
find "$packages" \( -name '*.a' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' \) -delete
# Compiled bytecode makes a start quick, as a read-only root file system can keep none. A run uses one model of hundreds.
find "$packages"/transformers/models -mindepth 2 -type d -name __pycache__ ! -path '*/auto/*' ! -path '*/llama/*' \
    -prune -exec rm -rf {} + 2>/dev/null || true
# torch takes Triton, a compiler, for optional kernels where it finds it; it would then miss a C compiler.
rm -rf "$packages"/triton "$packages"/*triton*.dist-info "$packages"/nvidia/*/include
# hivemind asks for the protobuf compiler and uses it only to build itself
rm -rf "$packages"/grpc_tools "$packages"/grpcio_tools-*.dist-info "$1"/bin/python-grpc-tools-protoc
