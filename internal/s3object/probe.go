package s3object

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
)

// attempts is how often each condition must be honoured. A server that ignores half of them passes with a chance of 1 in 65,536.
const attempts = 8

// ErrNoConditions is wrapped by the error of [Probe] if the server ignores the conditions of a PUT.
var ErrNoConditions = errors.New("the server does not honour conditional writes")

// Probe checks on a scratch object, whose name begins with prefix, that the server honours If-None-Match and If-Match. It takes 20
// requests, because one address may stand for several servers. It can't check that the server compares and writes atomically. It
// retries a few times if the server is overloaded.
func Probe(ctx context.Context, client *s3.Client, bucket, prefix string) error {
	for d := 100 * time.Millisecond; ; d *= 2 {
		err := probe(ctx, client, bucket, prefix)
		if err == nil || errors.Is(err, ErrNoConditions) || status(err) == 0 || !Transient(err) || d > time.Second {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(d):
		}
	}
}

func probe(ctx context.Context, client *s3.Client, bucket, prefix string) (err error) {
	name := prefix + "~probe-" + rand.Text()
	put := func(body string, in *s3.PutObjectInput) (etag string, err error) {
		in.Bucket, in.Key, in.Body = &bucket, &name, strings.NewReader(body)
		// No retries: after a lost reply, a retry fails its own condition.
		out, err := client.PutObject(ctx, in, func(o *s3.Options) { o.Retryer = aws.NopRetryer{} })
		if err != nil {
			return "", err
		}
		return aws.ToString(out.ETag), nil
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		// An error is no reason to refuse the server.
		_, _ = client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &bucket, Key: &name}, func(o *s3.Options) { o.Retryer = aws.NopRetryer{} })
		if err != nil {
			err = fmt.Errorf("probing bucket %q: %w", bucket, err)
		}
	}()

	first, err := put("1", Condition(""))
	switch {
	case status(err) == http.StatusNotImplemented:
		return fmt.Errorf("%w: it refuses If-None-Match: %w", ErrNoConditions, err)
	case err != nil:
		return err
	}
	for range attempts {
		switch _, err := put("2", Condition("")); {
		case err == nil:
			return fmt.Errorf("%w: it ignores If-None-Match: * and accepted a second first write of an object", ErrNoConditions)
		case !LostRace(err):
			return err
		}
	}
	second, err := put("3", Condition(first))
	switch {
	case err != nil && (LostRace(err) || status(err) == http.StatusNotImplemented):
		return fmt.Errorf("%w: it refuses If-Match with the object's own ETag %s: %w", ErrNoConditions, first, err)
	case err != nil:
		return err
	case first == "" || first == second:
		return fmt.Errorf("%w: the ETag was %q before and %q after the object's content changed", ErrNoConditions, first, second)
	}
	for range attempts {
		switch _, err := put("4", Condition(first)); {
		case err == nil:
			return fmt.Errorf("%w: it ignores If-Match and accepted a write with the ETag of a replaced version", ErrNoConditions)
		case !LostRace(err):
			return err
		}
	}
	head, err := client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &bucket, Key: &name})
	if err != nil {
		return err
	}
	if got := aws.ToString(head.ETag); got != second {
		return fmt.Errorf("%w: the object has the ETag %s; that of its last accepted write was %s", ErrNoConditions, got, second)
	}
	return nil
}
