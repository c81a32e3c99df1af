package redisstore

// Prefix is the Store's, for tests that open a second one on the same records.
func (s *Store) Prefix() string { return s.prefix }
