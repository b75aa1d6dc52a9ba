"""The engine on a GPU: decisions (`plan`), memory, the decoder, and its CUDA graphs.

What touches CUDA is `device.CudaDevice`; all else runs on any device, and in tests on the CPU with Triton's
interpreter. Not run on a GPU so far.
"""
