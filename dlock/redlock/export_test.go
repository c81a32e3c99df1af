package redlock

// Loose is the number of owners with requests in flight that belong to attempts which were given up.
func (b *Backend) Loose() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.loose)
}
