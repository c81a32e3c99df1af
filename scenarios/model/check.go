package model

import (
	"bytes"
	"encoding/binary"
	"slices"
)

// Check visits all states, breadth first, until one breaks a rule in broken. It returns the number of states and the shortest
// path to that one, or nil. Unless distinct, states that differ only by a permutation of workers count as one.
func (c *Config) Check(broken Breach, distinct bool) (states int, shortest []Step) {
	type visit struct {
		key    string
		parent int
	}
	queue := []State{{}}
	visits := []visit{{queue[0].key(distinct), -1}}
	known := map[string]bool{visits[0].key: true}
	for at := 0; len(queue) > 0; at++ {
		s := queue[0]
		queue = queue[1:]
		for _, step := range c.Next(s) {
			key := step.State.key(distinct)
			if known[key] {
				continue
			}
			known[key] = true
			visits = append(visits, visit{key, at})
			queue = append(queue, step.State)
			if step.State.Broken&broken == 0 {
				continue
			}
			path := []string{key}
			for i := at; i > 0; i = visits[i].parent {
				path = append(path, visits[i].key)
			}
			s = State{}
			for _, key := range slices.Backward(path) { // again, for the names of workers, which keys lack
				steps := c.Next(s)
				i := slices.IndexFunc(steps, func(step Step) bool { return step.State.key(distinct) == key })
				shortest = append(shortest, steps[i])
				s = steps[i].State
			}
			return len(visits), shortest
		}
	}
	return len(visits), nil
}

func (s *State) key(distinct bool) string {
	var buf [MaxWorkers][32]byte
	var workers [MaxWorkers][]byte
	for i, w := range s.Workers {
		workers[i] = buf[i][:1]
		if w.Phase != Idle {
			live := map[bool]int{true: 1}[w.Live]
			workers[i] = pack(buf[i][:0], w.Ledger, int(w.Phase), live, w.Grant, w.Fence.Token, w.Fence.Seq)
		}
	}
	if !distinct {
		slices.SortFunc(workers[:], bytes.Compare)
	}
	key := pack(make([]byte, 0, 128), s.Value, s.Holder, s.Grants, s.Top, s.Seen.Token, s.Seen.Seq, s.Max.Token, s.Max.Seq, s.Last, int(s.Broken))
	for _, w := range workers {
		key = append(key, w...)
	}
	for _, m := range s.Sent {
		key = pack(key, m.Value, m.Grant, m.Fence.Token, m.Fence.Seq)
	}
	return string(key)
}

// pack appends an unambiguous encoding of numbers and text.
func pack(b []byte, text string, numbers ...int) []byte {
	for _, n := range numbers {
		b = binary.AppendUvarint(b, uint64(n))
	}
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}
