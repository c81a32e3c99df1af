package faults

import (
	"context"
	"errors"
)

// Cut is a network partition: [Link.LoseRequests] and [Link.LoseReplies] at once.
func (l *Link) Cut(ctx context.Context) (Heal, error) {
	return inject(ctx, "cut", l.both(drop, 0)...)
}

// Partition cuts all of links or, on an error, none. The heal heals as many as it can.
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
