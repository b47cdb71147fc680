"""The `wgpu` backend: kernels as WGSL compute shaders, on any GPU that Vulkan, Metal or DirectX 12 reaches."""
