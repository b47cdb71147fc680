"""From graph to plan: options, devices, dispatch, costs, the compile pipeline."""
