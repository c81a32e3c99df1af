package populate

// The readings of what servers say.
var (
	ParseInfo    = parseInfo
	ParseMetrics = parseMetrics
)
