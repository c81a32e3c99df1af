package faults

import (
	"context"
	"errors"
)

// Cut is a partition: [Link.LoseRequests] and [Link.LoseReplies] at once.
func (l *Link) Cut(ctx context.Context) (Heal, error) {
	return inject(ctx, "cut", l.cut()...)
}

// Partition cuts several links as one partition: a worker off from some of its servers, say. In force means that every
// one of them is cut, as by [Link.Cut]; if one can't be, none is. The heal heals all of them, and is over when the last
// one is; a link that can't be healed keeps no other from it.
func Partition(ctx context.Context, links ...*Link) (Heal, error) {
	if len(links) == 0 {
		return nil, errors.New("faults: partition of no links")
	}
	var cuts []strike
	for _, l := range links {
		cuts = append(cuts, l.cut()...)
	}
	return inject(ctx, "partition", cuts...)
}

func (l *Link) cut() []strike {
	return []strike{{l, l.requests, drop, 0}, {l, l.replies, drop, 0}}
}
