package dlocktest

// Cases is the names of all cases and the numbers of their rules.
func Cases() map[string]int {
	m := map[string]int{}
	for _, c := range cases {
		m[c.name] = c.rule
	}
	return m
}
