package faults

import (
	"context"
	"errors"
)

// Cut is a partition: [Link.LoseRequests] and [Link.LoseReplies] at once.
func (l *Link) Cut(ctx context.Context) (Heal, error) {
	requests, err := l.LoseRequests(ctx)
	if err != nil {
		return nil, err
	}
	replies, err := l.LoseReplies(ctx)
	if err != nil {
		return nil, errors.Join(err, requests(ctx))
	}
	return func(ctx context.Context) error { return errors.Join(requests(ctx), replies(ctx)) }, nil
}
