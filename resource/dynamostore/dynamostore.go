// Package dynamostore is a [resource.Store] in an Amazon DynamoDB table, by conditional updates
// (https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/Expressions.ConditionExpressions.html).
//
// It requires that
//   - the table is in one region, or a global table with strong consistency (MRSC), or all writes of a key go to one region: with
//     eventual consistency (MREC, the default) stale writes get through
//     (https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/V2globaltables_HowItWorks.html);
//     `fencelab probe` finds such a table;
//   - nobody else writes the attributes fence and value or deletes items, by hand or by TTL;
//   - reads don't go through DynamoDB Accelerator (DAX).
//
// A restored backup brings old fences back.
package dynamostore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/awscall"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

// The attributes of an item. One that only fenced reads have touched has no value.
const (
	attrKey   = "key"
	attrFence = "fence"
	attrValue = "value" // reserved: expressions need a placeholder
)

const maxItem = 400 << 10 // bytes of names and values: docs.aws.amazon.com/amazondynamodb/latest/developerguide/Constraints.html

// Store is a [resource.Store] in a table, which several processes may use.
type Store struct {
	client *dynamodb.Client
	table  string
	calls  calls.Calls
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// New returns a Store on an existing table, see [CreateTable]. It sends nothing.
func New(client *dynamodb.Client, table string) (*Store, error) {
	switch {
	case client == nil:
		return nil, errors.New("dynamostore: client is nil")
	case table == "":
		return nil, errors.New("dynamostore: table is empty")
	}
	return &Store{client: client, table: table}, nil
}

// Schema is the least that a [Store] needs: a partition key "key" of type S, no sort key, billed by request.
func Schema(table string) *dynamodb.CreateTableInput {
	return &dynamodb.CreateTableInput{
		TableName:            &table,
		BillingMode:          types.BillingModePayPerRequest,
		AttributeDefinitions: []types.AttributeDefinition{{AttributeName: aws.String(attrKey), AttributeType: types.ScalarAttributeTypeS}},
		KeySchema:            []types.KeySchemaElement{{AttributeName: aws.String(attrKey), KeyType: types.KeyTypeHash}},
	}
}

// CreateTable creates a table by [Schema], unless it exists, and waits until it can be used.
func CreateTable(ctx context.Context, client *dynamodb.Client, table string) error {
	_, err := client.CreateTable(ctx, Schema(table))
	if _, exists := errors.AsType[*types.ResourceInUseException](err); err != nil && !exists {
		return failed(ctx, err)
	}
	in := &dynamodb.DescribeTableInput{TableName: &table}
	out, err := client.DescribeTable(ctx, in)
	_, unseen := errors.AsType[*types.ResourceNotFoundException](err)
	if unseen || err == nil && out.Table.TableStatus == types.TableStatusCreating {
		err = dynamodb.NewTableExistsWaiter(client).Wait(ctx, in, 5*time.Minute)
	}
	if err != nil {
		return failed(ctx, err)
	}
	return nil
}

// Write is [resource.Store.Write], even if the client retries a request. If the repeat of an applied call loses its first reply,
// it returns nil, not an error that matches [resource.ErrApplied]. Key and value must fit into 400 KB.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := s.calls.Begin(ctx, key, resource.CheckFence(f), checkSize(key, value)); err != nil {
		return err
	}
	defer s.calls.End()
	doubt := false
	_, seen, err := s.raise(ctx, key, f, bytesValue(value), &doubt)
	if err != nil || seen == nil {
		return err
	}
	if err = seen.CheckWrite(key, f, value); err == nil {
		return fmt.Errorf("dynamostore: Write of %q at %v was refused by an item whose fence is %v", key, f, seen.MaxFence)
	}
	return awscall.Outcome("dynamostore", err, doubt)
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	if err := s.calls.Begin(ctx, key, resource.CheckToken(f.Token)); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.End()
	rec, seen, err := s.raise(ctx, key, f, nil, new(bool))
	if err != nil || seen == nil {
		return rec, err
	}
	if err := seen.CheckRead(key, f); err != nil {
		return resource.Record{}, err
	}
	return *seen, nil // its own grant has touched the key before
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (resource.Record, error) {
	if err := s.calls.Begin(ctx, key); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.End()
	out, err := s.client.GetItem(ctx, &dynamodb.GetItemInput{TableName: &s.table, Key: id(key), ConsistentRead: aws.Bool(true)})
	if err != nil {
		return resource.Record{}, failed(ctx, err)
	}
	rec, err := s.decode(key, out.Item)
	if err == nil && rec.Value == nil && rec.MaxFence == (resource.Fence{}) {
		err = resource.ErrNotFound
	}
	return rec, err
}

// Overwrite is [resource.Overwriter.Overwrite].
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := s.calls.Begin(ctx, key, resource.CheckOffered(f), checkSize(key, value)); err != nil {
		return err
	}
	defer s.calls.End()
	if f != (resource.Fence{}) {
		_, seen, err := s.raise(ctx, key, f, bytesValue(value), new(bool))
		if err != nil || seen == nil {
			return err
		}
	}
	_, err := s.client.UpdateItem(ctx, &dynamodb.UpdateItemInput{
		TableName: &s.table, Key: id(key), UpdateExpression: aws.String("SET #value = :value"),
		ExpressionAttributeNames:  map[string]string{"#value": attrValue},
		ExpressionAttributeValues: map[string]types.AttributeValue{":value": bytesValue(value)},
	})
	return failed(ctx, calls.Late(ctx, err))
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	if err := s.calls.Begin(ctx, key, resource.CheckToken(token)); err != nil {
		return err
	}
	defer s.calls.End()
	_, err := s.client.UpdateItem(ctx, &dynamodb.UpdateItemInput{
		TableName: &s.table, Key: id(key), UpdateExpression: aws.String("SET fence = :fence"),
		ConditionExpression:       aws.String("attribute_exists(fence) OR attribute_exists(#value)"), // as in Read
		ExpressionAttributeNames:  map[string]string{"#value": attrValue},
		ExpressionAttributeValues: map[string]types.AttributeValue{":fence": &types.AttributeValueMemberS{Value: encode(resource.Fence{Token: token})}},
	})
	if _, missing := errors.AsType[*types.ConditionalCheckFailedException](err); missing {
		return resource.ErrNotFound
	}
	return failed(ctx, calls.Late(ctx, err))
}

// Close is [resource.Store.Close]. The client stays open.
func (s *Store) Close() error {
	s.calls.Close()
	return nil
}

// raise raises the fence of key's item to f if f is greater, and sets value unless nil. It returns the new item or, as seen, the
// item that refused f. doubt is set if a reply was lost.
func (s *Store) raise(ctx context.Context, key string, f resource.Fence, value types.AttributeValue, doubt *bool,
) (rec resource.Record, seen *resource.Record, err error) {
	in := &dynamodb.UpdateItemInput{
		TableName:                           &s.table,
		Key:                                 id(key),
		UpdateExpression:                    aws.String("SET fence = :fence"),
		ConditionExpression:                 aws.String("attribute_not_exists(fence) OR fence < :fence"),
		ExpressionAttributeValues:           map[string]types.AttributeValue{":fence": &types.AttributeValueMemberS{Value: encode(f)}},
		ReturnValues:                        types.ReturnValueAllNew,
		ReturnValuesOnConditionCheckFailure: types.ReturnValuesOnConditionCheckFailureAllOld,
	}
	if value != nil {
		in.UpdateExpression = aws.String("SET fence = :fence, #value = :value")
		in.ExpressionAttributeNames = map[string]string{"#value": attrValue}
		in.ExpressionAttributeValues[":value"] = value
		in.ReturnValues = types.ReturnValueNone
	}
	out, err := s.client.UpdateItem(ctx, in, func(o *dynamodb.Options) { o.Retryer = awscall.Retryer(o.Retryer, doubt) })
	refusal, refused := errors.AsType[*types.ConditionalCheckFailedException](err)
	switch {
	case refused && len(refusal.Item) == 0:
		return rec, nil, fmt.Errorf("dynamostore: the server refused a call on %q and did not return the item "+
			"(ReturnValuesOnConditionCheckFailure): %w", key, err)
	case refused:
		rec, err = s.decode(key, refusal.Item)
		return rec, &rec, err
	case err != nil:
		return rec, nil, failed(ctx, calls.Late(ctx, err))
	case value == nil:
		rec, err = s.decode(key, out.Attributes)
	}
	return rec, nil, err
}

func id(key string) map[string]types.AttributeValue {
	return map[string]types.AttributeValue{attrKey: &types.AttributeValueMemberS{Value: key}}
}

// bytesValue copies b; nil would mean no value.
func bytesValue(b []byte) types.AttributeValue {
	return &types.AttributeValueMemberB{Value: append([]byte{}, b...)}
}

const digits = 20

// encode returns a string of fixed width, so that strings compare as fences do. A DynamoDB number has only 38 digits.
func encode(f resource.Fence) string { return fmt.Sprintf("%0*d.%0*d", digits, f.Token, digits, f.Seq) }

func (s *Store) decode(key string, item map[string]types.AttributeValue) (resource.Record, error) {
	var rec resource.Record
	switch a := item[attrFence].(type) {
	case nil:
	case *types.AttributeValueMemberS:
		var err error
		if rec.MaxFence, err = parse(a.Value); err != nil {
			return rec, fmt.Errorf("dynamostore: item %q of table %s: %w", key, s.table, err)
		}
	default:
		return rec, fmt.Errorf("dynamostore: item %q of table %s: its fence has type %T, want a string", key, s.table, a)
	}
	switch a := item[attrValue].(type) {
	case nil:
	case *types.AttributeValueMemberB:
		rec.Value = append([]byte{}, a.Value...)
	default:
		return rec, fmt.Errorf("dynamostore: item %q of table %s: its value has type %T, want bytes", key, s.table, a)
	}
	return rec, nil
}

func parse(fence string) (resource.Fence, error) {
	f, err := resource.ParseFence(fence)
	if err != nil || encode(f) != fence {
		return resource.Fence{}, fmt.Errorf("its fence is %.60q, want two numbers of %d digits with a point between", fence, digits)
	}
	return f, nil
}

func checkSize(key string, value []byte) error {
	most := maxItem - len(attrKey) - len(key) - len(attrFence) - len(encode(resource.Fence{})) - len(attrValue)
	if len(value) <= most {
		return nil
	}
	return fmt.Errorf("%w: that of %q has %d bytes, at most %d fit into an item", resource.ErrTooLarge, key, len(value), most)
}

func failed(ctx context.Context, err error) error { return calls.Wrap(ctx, "dynamostore", err) }
