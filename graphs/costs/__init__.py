"""Time and workspace of each op: profiled on the device, or the roofline of a named one."""
