"""Space-time diagrams: one model of lanes, intervals, messages and cuts, for the page, pictures and traces."""
