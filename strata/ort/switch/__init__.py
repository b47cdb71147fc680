"""A folder for PYTHONPATH whose sitecustomize makes `import onnxruntime` mean strata.ort."""
