package faults

import (
	"context"
	"errors"
)

// Cut is a partition: [Link.LoseRequests] and [Link.LoseReplies] at once.
func (l *Link) Cut(ctx context.Context) (Heal, error) {
	return inject(ctx, "cut", l.both(drop, 0)...)
}

// Partition cuts several links as one fault: a worker off from some of its servers, say. If one of them can't be cut, none is.
// The heal is over when the last link is healed; one that can't be healed keeps no other from it.
func Partition(ctx context.Context, links ...*Link) (Heal, error) {
	if len(links) == 0 {
		return nil, errors.New("faults: partition of no links")
	}
	var cuts []effect
	for _, l := range links {
		cuts = append(cuts, l.both(drop, 0)...)
	}
	return inject(ctx, "partition", cuts...)
}
