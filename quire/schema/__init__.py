"""Types that cross packages or processes: frozen data, no behaviour, no torch."""
