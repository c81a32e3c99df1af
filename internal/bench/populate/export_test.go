package populate

var (
	ParseInfo    = parseInfo
	ParseMetrics = parseMetrics
)
