"""What a compile or a run did: explanations, fusion reports, profiles, traces, NaN watches."""
