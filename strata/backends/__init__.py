"""Backends: a folder each. The registry imports one only when a device asks for it."""

from strata.modules import deferred

with deferred(globals()):
    from strata.backends.base import (
        Backend,
        Capabilities,
        CodeArchive,
        CostModel,
        Entry,
        Executable,
        FastCall,
        MissingCodeError,
        ProcessorShare,
        ThreadSpread,
    )
    from strata.backends.registry import (
        REPLACED,
        backend_for,
        known_backends,
        planner_for,
        register_backend,
        registration,
    )
    from strata.backends.resident import HOMES, DeviceArray, DeviceHome, DeviceName, MemoryUse
    from strata.backends.texts import module_text, stablehlo_text
