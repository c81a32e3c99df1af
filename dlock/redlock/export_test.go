package redlock

// Loose is the number of owners of given-up attempts with requests in flight.
func (b *Backend) Loose() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.loose)
}
