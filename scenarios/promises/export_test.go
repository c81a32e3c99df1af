package promises

// Names are the promises'.
func Names() (all []string) {
	for _, p := range promises {
		all = append(all, p.name)
	}
	return all
}
