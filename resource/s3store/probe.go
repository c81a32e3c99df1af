package s3store

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/fencelab/fencelab/resource/internal/awscall"
)

// tries is how often each condition must be honoured. A server that ignores half of them passes with a chance of 1 in 65,536.
const tries = 8

// Probe checks on a scratch object that the server honours If-None-Match and If-Match, else the error wraps [ErrNoConditions].
// It takes 20 requests, because one address may stand for several servers. It can't check that the server compares and writes
// atomically; package storetest can.
func (s *Store) Probe(ctx context.Context) (err error) {
	name := s.o.Prefix + "~probe-" + rand.Text()
	put := func(body string, in *s3.PutObjectInput) (etag string, err error) {
		in.Bucket, in.Key, in.Body = &s.bucket, &name, strings.NewReader(body)
		// No retries: after a lost reply one fails its own condition.
		out, err := s.client.PutObject(ctx, in, func(o *s3.Options) { o.Retryer = aws.NopRetryer{} })
		if err != nil {
			return "", err
		}
		return aws.ToString(out.ETag), nil
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_, _ = s.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &s.bucket, Key: &name}) // no reason to refuse the server
		if err != nil {
			err = fmt.Errorf("s3store: probing bucket %q: %w", s.bucket, err)
		}
	}()

	first, err := put("1", condition(""))
	switch {
	case awscall.Status(err) == http.StatusNotImplemented:
		return fmt.Errorf("%w: it refuses If-None-Match: %w", ErrNoConditions, err)
	case err != nil:
		return failed(ctx, err)
	}
	for range tries {
		switch _, err := put("2", condition("")); {
		case err == nil:
			return fmt.Errorf("%w: it ignores If-None-Match: * and accepted a second first write of an object", ErrNoConditions)
		case !lostRace(err):
			return failed(ctx, err)
		}
	}
	second, err := put("3", condition(first))
	switch {
	case err != nil && (lostRace(err) || awscall.Status(err) == http.StatusNotImplemented):
		return fmt.Errorf("%w: it refuses If-Match with the object's own ETag %s: %w", ErrNoConditions, first, err)
	case err != nil:
		return failed(ctx, err)
	case first == "" || first == second:
		return fmt.Errorf("%w: the ETag was %q before and %q after the object's content changed", ErrNoConditions, first, second)
	}
	for range tries {
		switch _, err := put("4", condition(first)); {
		case err == nil:
			return fmt.Errorf("%w: it ignores If-Match and accepted a write with the ETag of a replaced version", ErrNoConditions)
		case !lostRace(err):
			return failed(ctx, err)
		}
	}
	head, err := s.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &s.bucket, Key: &name})
	if err != nil {
		return failed(ctx, err)
	}
	if got := aws.ToString(head.ETag); got != second {
		return fmt.Errorf("%w: the object has the ETag %s; that of its last accepted write was %s", ErrNoConditions, got, second)
	}
	return nil
}
