"""Storage servers, real and fake, proxies that make faults, and the conformance suite."""
