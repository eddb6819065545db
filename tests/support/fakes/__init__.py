"""Stand-ins for servers, engines, ranks, devices and samplers, beside tests of the real ones."""
